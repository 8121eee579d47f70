"""`rates` for those that send gradients in every step, with DDP's buckets and with smaller ones, over the faster links."""

from benchmarks import rates


def main() -> None:
    """One table a link."""
    rates.main("compressed_rates", ["1gbit", "100mbit"], ["compressed"])


if __name__ == "__main__":
    main()
