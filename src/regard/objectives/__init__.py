"""Training objectives: each is a spec that encodes examples and computes a loss; base.py has the interface.

A new objective is one file here, one line in OBJECTIVES (kinds.py), and one line in tests/objectives/test_contract.py.
"""
