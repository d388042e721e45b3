"""Launch, and print all ordinals and the number of processes as each replica sees them."""

import polyxla


def train(replica: polyxla.Replica) -> tuple[list[int], int]:
    return replica.all_gather(replica.ordinal), replica.world.process_count


if __name__ == "__main__":
    # One string: several processes write to one pipe.
    print(f"RESULT {polyxla.launch(train)}\n", end="", flush=True)
