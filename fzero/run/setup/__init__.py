"""What a run starts from: folder, machine, corpus, weights, vocabulary, and the step that a config describes."""
