"""Steps of CUDA graphs: one graph for every F, I, W and B of a program, with messages between the replays."""
