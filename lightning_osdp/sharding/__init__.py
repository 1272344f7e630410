"""Doing: applies an ExecutionPlan to a module."""
