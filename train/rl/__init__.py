"""Rewards that can be verified: questions with exact answers, a model's own answers, and how it learns from these."""
