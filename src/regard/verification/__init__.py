"""`regard.verify(model)`: laws that must hold for every combination of features, tested on a model of any parts.

    cached = whole, chunked = whole, batched = alone, padded = unpadded, packed = separate, …

`laws` has one function per law, `trial` and `trials` the inputs for each kind of model, `outcome` the tolerances, and
`report` tests all laws.
"""
