"""Measuring: reads the module and the hardware, returns values of ``lightning_osdp.planning``."""
