// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// The command line wins over the environment, which wins over the file, which
// wins over the defaults.
func TestFlagsComeFromCommandLineEnvironmentAndFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "xspin.yaml")
	if err := os.WriteFile(file, []byte("demo:\n  pingpong:\n    count: 30\n    size: [64, 128]\n    proto: udp\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	one := filepath.Join(t.TempDir(), "one.yaml")
	if err := os.WriteFile(one, []byte("demo: {pingpong: {size: [16]}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		env  map[string]string
		args string
		want string
	}{
		{"defaults", nil, "", "both 10000 [16,516,1016,1416]"},
		{"file", nil, "--config " + file, "udp 30 [64,128]"},
		{"lists of one in the file", map[string]string{"XSPIN_CONFIG": one}, "", "both 10000 [16]"},
		{"file named by the environment", map[string]string{"XSPIN_CONFIG": file}, "", "udp 30 [64,128]"},
		{"environment over file", map[string]string{"XSPIN_DEMO_PINGPONG_COUNT": "20", "XSPIN_DEMO_PINGPONG_SIZE": "99,100"}, "--config " + file, "udp 20 [99,100]"},
		{"command line over both", map[string]string{"XSPIN_DEMO_PINGPONG_COUNT": "20"}, "--count 10 --config " + file, "udp 10 [64,128]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for k, v := range tt.env {
				t.Setenv(k, v)
			}
			if got := flagsSeen(t, tt.args); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// flagsSeen runs demo pingpong with another body, which tells its flags.
func flagsSeen(t *testing.T, args string) string {
	t.Helper()
	root := newRootCmd()
	cmd, _, err := root.Find([]string{"demo", "pingpong"})
	if err != nil {
		t.Fatal(err)
	}
	var seen string
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for _, name := range []string{"proto", "count", "size"} {
			seen += " " + cmd.Flag(name).Value.String()
		}
		return nil
	}
	root.SetArgs(append([]string{"demo", "pingpong"}, strings.Fields(args)...))
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	return seen[1:]
}

func TestBadConfigurationIsAnErrorThatNamesIt(t *testing.T) {
	misspelt := filepath.Join(t.TempDir(), "x.yaml")
	if err := os.WriteFile(misspelt, []byte("demo: {pingpong: {cuont: 20}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, env, value, args, want string }{
		{"misspelt key", "XSPIN_CONFIG", misspelt, "demo pingpong", "demo.pingpong.cuont"},
		{"value", "XSPIN_DEMO_PINGPONG_COUNT", "many", "demo pingpong", "XSPIN_DEMO_PINGPONG_COUNT"},
		{"file that is not there", "XSPIN_CONFIG", "/nonexistent/x.yaml", "demo pingpong", "/nonexistent/x.yaml"},
		{"unknown command", "X", "", "demo pong", "pong"},
		{"unknown flag", "X", "", "demo pingpong --cuont 1", "--cuont"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(tt.env, tt.value)
			root := newRootCmd()
			root.SetArgs(strings.Fields(tt.args))
			root.SetOut(new(strings.Builder))
			if err := root.Execute(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one about %q", err, tt.want)
			}
		})
	}
}

func TestVersionIsACommandToo(t *testing.T) {
	var command, flag bytes.Buffer
	if err := xspin(t.Context(), nil, &command, io.Discard, "version"); err != nil {
		t.Fatal(err)
	}
	if err := xspin(t.Context(), nil, &flag, io.Discard, "--version"); err != nil {
		t.Fatal(err)
	}
	if command.String() != flag.String() || !strings.HasPrefix(command.String(), "xspin version ") {
		t.Errorf("the command says %q, the flag %q", &command, &flag)
	}
}

// The commands start their own executable for what must be another process.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "send" || strings.HasPrefix(os.Args[1], "_")) {
		Main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}
