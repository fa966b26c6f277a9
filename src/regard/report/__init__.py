"""What a run leaves for people to look at: pictures, and a page that holds them."""
