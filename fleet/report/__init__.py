"""A run on one page: what it came to, how it got there, who did what when."""
