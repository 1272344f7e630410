"""The engine that shards with FairScale. Nothing else imports ``fairscale``."""
