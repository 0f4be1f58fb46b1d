"""Post-training: language models that are bred: evaluated, merged, fine-tuned on data that their genomes choose."""
