"""The command ``osdp``."""
