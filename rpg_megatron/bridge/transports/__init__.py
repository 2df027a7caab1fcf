"""What carries weights from ranks to engine workers."""
