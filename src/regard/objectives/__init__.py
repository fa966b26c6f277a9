"""Training objectives: each is a spec that encodes examples and computes a loss; base.py has the interface.

A new objective is one file here, one line in OBJECTIVES (kinds.py), one in tests/objectives/test_contract.py and one
in tests/cli/pairs.py.
"""
