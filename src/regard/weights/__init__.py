"""How another library's tensors become ours and ours theirs: `ops` are the steps, a `table` of links the whole map."""
