"""Figures, each against what it is compared with. A package, since FairScale installs one of this name."""
