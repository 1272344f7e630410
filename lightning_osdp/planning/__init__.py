"""Deciding: pure functions and frozen values. No torch, no process group, no clock, no printing."""
