//! The `tandem` binary.

fn main() -> std::process::ExitCode {
    proxy::cli::main(std::env::args_os())
}
