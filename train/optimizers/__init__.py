"""Optimizers, and rules that change their updates."""
