/* lookup-glibc and lookup-musl: `lookup host NAME` prints the addresses of a name, a line each, and `lookup txt NAME` how many
 * bytes of text it has; or "no-name" where there is no such name, else "failed: …". */
#include <arpa/inet.h>
#include <arpa/nameser.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

static int txt(const char *name) {
	static unsigned char answer[65535];
	int n = res_query(name, ns_c_in, ns_t_txt, answer, sizeof answer), bytes = 0;
	ns_msg m;
	ns_rr rr;
	if (n < 0) return puts("no-name");
	if (ns_initparse(answer, n, &m) < 0) return puts("failed: no message");
	if (ns_msg_getflag(m, ns_f_tc)) return puts("failed: cut");
	for (int i = 0; i < ns_msg_count(m, ns_s_an); i++) {
		if (ns_parserr(&m, ns_s_an, i, &rr) < 0) return puts("failed: a record");
		for (int at = 0; at < ns_rr_rdlen(rr); at += 1 + ns_rr_rdata(rr)[at]) bytes += ns_rr_rdata(rr)[at];
	}
	return printf("%d\n", bytes);
}

int main(int argc, char **argv) {
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *all;
	char text[INET6_ADDRSTRLEN];
	int err;
	if (argc != 3) return 2;
	if (strcmp(argv[1], "txt") == 0) return txt(argv[2]) < 0;
	err = getaddrinfo(argv[2], NULL, &hints, &all);
	if (err == EAI_NONAME) return puts("no-name") < 0;
	if (err) return printf("failed: %s\n", gai_strerror(err)) < 0;
	for (struct addrinfo *a = all; a; a = a->ai_next) {
		const void *addr = a->ai_family == AF_INET ? (void *)&((struct sockaddr_in *)a->ai_addr)->sin_addr
		                                           : (void *)&((struct sockaddr_in6 *)a->ai_addr)->sin6_addr;
		puts(inet_ntop(a->ai_family, addr, text, sizeof text));
	}
	return 0;
}
