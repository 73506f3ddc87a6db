"""What a model is: its sizes, its layers and their weights of time, and how flags cut it into stages."""
