// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestInstall has make install put below DESTDIR what docs/install.md lists, and make
// uninstall remove it.
func TestInstall(t *testing.T) {
	tree := t.TempDir()
	for _, name := range []string{"Makefile", "dist"} {
		abs, err := filepath.Abs(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(abs, filepath.Join(tree, name)); err != nil {
			t.Fatal(err)
		}
	}
	run := func(arg ...string) (string, error) {
		cmd := exec.Command("make", append([]string{"-C", tree}, arg...)...)
		cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
			return strings.HasPrefix(kv, "MAKE") || strings.HasPrefix(kv, "MFLAGS=")
		})
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	mustRun := func(arg ...string) string {
		t.Helper()
		out, err := run(arg...)
		if err != nil {
			t.Fatalf("make %q: %v\n%s", arg, err, out)
		}
		return out
	}

	dest := filepath.Join(t.TempDir(), "dest")
	if out, err := run("install", "DESTDIR="+dest); err == nil || !strings.Contains(out, "make build") {
		t.Errorf("without bin/xspin: %v, want an error that tells what to do\n%s", err, out)
	}
	build := exec.Command("go", "build", "-o", filepath.Join(tree, "bin", "xspin"), "../cmd/xspin")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	page, err := os.ReadFile("../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(/[^`]*)` \\|").FindAllStringSubmatch(string(page), -1) {
		listed = append(listed, m[1])
	}
	slices.Sort(listed)
	mustRun("install", "DESTDIR="+dest)
	if got := files(t, dest); !slices.Equal(got, listed) {
		t.Errorf("make install puts\n%q, docs/install.md lists\n%q", got, listed)
	}
	for _, name := range listed {
		b, err := os.ReadFile(filepath.Join(dest, name))
		if err != nil || len(b) == 0 {
			t.Errorf("%s: %d bytes, error %v", name, len(b), err)
		}
		if name != "/usr/local/bin/xspin" && strings.Contains(string(b), dest) {
			t.Errorf("%s knows DESTDIR", name)
		}
	}
	mustRun("uninstall", "DESTDIR="+dest)
	if got := files(t, dest); len(got) > 0 {
		t.Errorf("make uninstall leaves %q", got)
	}

	// A configuration that its owner has changed is the owner's.
	root := t.TempDir()
	own := filepath.Join(root, "etc", "xspin", "xspin.yaml")
	if err := os.MkdirAll(filepath.Dir(own), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(own, []byte("# mine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	elsewhere := []string{"PREFIX=" + root + "/usr", "SYSCONFDIR=" + root + "/etc"}
	mustRun(append(elsewhere, "install")...)
	unit := filepath.Join(root, "usr", "lib", "systemd", "system", "xspin.service")
	b, err := os.ReadFile(unit)
	if want := "\nExecStart=" + root + "/usr/bin/xspin run " + own + "\n"; err != nil || !strings.Contains(string(b), want) {
		t.Errorf("the unit does not say %q, error %v:\n%s", want, err, b)
	}
	verify(t, unit)
	mustRun(append(elsewhere, "uninstall")...)
	if got := files(t, root); !slices.Equal(got, []string{"/etc/xspin/xspin.yaml"}) {
		t.Errorf("make uninstall leaves %q, want the configuration only", got)
	}
	if b, err := os.ReadFile(own); err != nil || string(b) != "# mine\n" {
		t.Errorf("the configuration is now %q, error %v", b, err)
	}
}

// verify has systemd judge a unit, where there is systemd.
func verify(t *testing.T, unit string) {
	t.Helper()
	name := "systemd-analyze"
	analyze, err := exec.LookPath(name)
	if err != nil {
		t.Logf("%s is not verified: %v", unit, err)
		return
	}
	if out, err := exec.Command(analyze, "verify", unit).CombinedOutput(); err != nil || strings.Contains(string(out), filepath.Base(unit)) {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

// files lists the files below a directory, as if that were the root.
func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, strings.TrimPrefix(path, dir))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
