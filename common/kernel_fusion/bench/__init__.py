"""Times, checks beside peers, profiles and counts: what fills results/."""
