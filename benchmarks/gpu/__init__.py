"""What a machine with a GPU can tell about this project, in one command."""
