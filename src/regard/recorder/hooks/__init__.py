"""Where attention passes in a model: dispatcher taps, seams and module hooks that observe without changing anything."""
