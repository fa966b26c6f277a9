"""Reports of runs and labs: plots, and HTML pages that contain them."""
