from edl.cli import main

main()
