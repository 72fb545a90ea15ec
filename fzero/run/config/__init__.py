"""What a run is told to do: the keys of a config, their values, versions and checks, and DeepSpeed's names for them."""
