"""Reads the module and measures the hardware; returns values of ``lightning_osdp.planning``."""
