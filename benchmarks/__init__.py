"""Figures that mean something on any machine: each stands beside a limit that was measured in the same run."""
