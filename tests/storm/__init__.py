"""The real protocol code on a simulated disk and clock, with every misfortune that a shared disk has to offer.

Everything is a function of one seed: who runs when, what is seen late, what is lost. `python -m tests.storm --help`.
"""
