"""Speed: ours beside peers, one command each, records committed in results/."""
