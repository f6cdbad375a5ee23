"""Running scripts that are not edited, by replacing names of Accelerate and transformers with ours."""
