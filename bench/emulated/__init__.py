"""One process as rank 0 of many that are not there: OSDP beside its peers, and predicted beside emulated."""
