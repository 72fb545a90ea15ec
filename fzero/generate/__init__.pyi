"""For contributors: what the other packages of fzero use."""
