"""A run on a shared disk: configuration, store, planning, the worker loop and its local starter. Imports no torch."""
