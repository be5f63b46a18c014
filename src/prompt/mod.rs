//! Prompt input → rendered text → token ids, exactly as the engine makes them.
