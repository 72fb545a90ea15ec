"""The second half of a step: from summed gradients to the new state, in memory, offloaded, or in the backward pass."""
