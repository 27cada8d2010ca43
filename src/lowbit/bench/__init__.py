"""What is measured (registry) and how (runner): ratios in one run, after a check that both sides are right.

Run it: ``python -m lowbit.bench --help``.
"""
