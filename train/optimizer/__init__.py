"""Optimizers, schedules, and the formats in which moments are stored."""
