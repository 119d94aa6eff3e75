package hostcheck

import (
	"os"
	"path/filepath"
	"testing"
)

// tree makes a host of files.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func statuses(checks []Check) map[string]Status {
	out := make(map[string]Status)
	for _, c := range checks {
		out[c.Name] = c.Status
	}
	return out
}

// TestThisHost: whatever the host, each check says something once, and what is wrong comes with a remedy.
func TestThisHost(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range Run(t.Context(), Options{Root: "/var/lib/shard"}) {
		if seen[c.Name] || c.Name == "" || c.Found == "" || (c.Remedy == "") != (c.Status == OK) {
			t.Errorf("%+v", c)
		}
		seen[c.Name] = true
	}
}

func TestMadeUpHosts(t *testing.T) {
	for name, tc := range map[string]struct {
		files map[string]string
		want  map[string]Status
	}{
		"nothing": {nil, map[string]Status{"overlayfs": Fail, "loop devices": Fail, "ext4": Fail, "namespaces": Fail, "cgroups": Fail,
			"KVM": Warn, "IPv4 forwarding": Warn, "systemd": Warn, "group shard": OK}},
		"old kernel": {map[string]string{"proc/sys/kernel/osrelease": "4.19.0-1\n"}, map[string]Status{"kernel": Fail}},
		"modules": {map[string]string{"proc/sys/kernel/osrelease": "6.1.0-9-amd64\n", "proc/filesystems": "nodev\tproc\n",
			"lib/modules/6.1.0-9-amd64/modules.builtin": "kernel/fs/ext4/ext4.ko\n",
			"lib/modules/6.1.0-9-amd64/modules.dep":     "kernel/fs/overlayfs/overlay.ko.xz: kernel/x.ko\nkernel/drivers/net/veth.ko:\nkernel/net/netfilter/nf_tables.ko:\n",
			"usr/sbin/mkfs.ext4":                        "", "usr/sbin/e2fsck": ""},
			map[string]Status{"kernel": OK, "overlayfs": OK, "ext4": OK, "veth and nftables": OK}},
		"v2":            {map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}, map[string]Status{"cgroups": OK}},
		"v2, no memory": {map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpu pids\n"}, map[string]Status{"cgroups": Fail}},
		"v1, memory off": {map[string]string{"proc/cgroups": "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\nmemory\t2\t1\t0\npids\t3\t1\t1\n"},
			map[string]Status{"cgroups": Fail}},
		"inotify": {map[string]string{"proc/sys/fs/inotify/max_user_instances": "64", "proc/sys/fs/inotify/max_user_watches": "1000000"},
			map[string]Status{"inotify": Warn}},
		"systemd": {map[string]string{"run/systemd/system/x": ""}, map[string]Status{"systemd": OK}},
	} {
		t.Run(name, func(t *testing.T) {
			got := statuses(Run(t.Context(), Options{Root: "/var/lib/shard", Tree: tree(t, tc.files)}))
			for check, want := range tc.want {
				if got[check] != want {
					t.Errorf("%s is %s, want %s", check, got[check], want)
				}
			}
		})
	}
}
