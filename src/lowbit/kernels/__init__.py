"""Kernels: tensors and frozen records in, tensors out. No autograd, no modules, no validation."""
