"""Settings of the whole suite."""

import torch
from hypothesis import settings

# Tensors here are small: threads that wait for one another on a busy machine cost more than they bring (16 times more).
torch.set_num_threads(1)

# No deadline: it would make a test depend on how busy the machine is. Derandomised: a failure here repeats anywhere.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("suite")
