"""Which units are gathered, and when: decisions without tensors, which training and the prediction of its memory both call."""
