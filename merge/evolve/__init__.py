"""The search for the best merge: CMA-ES over recipes that are scored by lm-eval's tasks."""
