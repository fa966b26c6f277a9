"""`verify`: the laws that hold wherever features cross, tried on a model, whatever parts it is made of.

    cached = whole, chunked = whole, batched = alone, padded = unpadded, packed = separate, …

`laws` has one function a law, `trial` what they are tried on, `verdict` the two columns of a table.
"""
