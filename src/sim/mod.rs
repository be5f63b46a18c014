//! A simulated replica: everything of an inference engine that a router can see, without the GPU.
