// get-rust is Rust in the image of clients. It trusts what the system trusts, or with --built-in first what it was built with; with
// --native-tls first its TLS is the system's too, which is OpenSSL.
use ureq::tls::{RootCerts, TlsConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let roots = match args.next_if(|a| a == "--built-in") {
        Some(_) => RootCerts::WebPki,
        None => RootCerts::PlatformVerifier,
    };
    let provider = match args.next_if(|a| a == "--native-tls") {
        #[cfg(feature = "native-tls")]
        Some(_) => ureq::tls::TlsProvider::NativeTls,
        #[cfg(not(feature = "native-tls"))]
        Some(_) => Err("built without it")?,
        None => ureq::tls::TlsProvider::Rustls,
    };
    let tls = TlsConfig::builder()
        .root_certs(roots)
        .provider(provider)
        .build();
    let agent = ureq::Agent::config_builder()
        .tls_config(tls)
        .build()
        .new_agent();
    let mut request = agent.get(args.next().ok_or("give a URL")?);
    if let Some((name, value)) = args.next().as_deref().and_then(|h| h.split_once(": ")) {
        request = request.header(name, value);
    }
    print!("{}", request.call()?.body_mut().read_to_string()?);
    Ok(())
}
