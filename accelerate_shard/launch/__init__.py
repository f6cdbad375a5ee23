"""Running scripts that are not edited: names of Accelerate and transformers replaced by ours."""
