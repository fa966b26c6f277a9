"""What several families share: reading and writing configs, links between tensor names, and models of one lineage."""
