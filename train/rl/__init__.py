"""Rewards that can be verified: questions with exact answers, a model's own answers to them, and how it learns from these."""
