"""Bodies and headers to jobs: bounded, parsed, checked, submitted for all prompts or none."""
