from headcode.cli import main

main()
