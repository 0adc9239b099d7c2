// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
)

// daemonConfig is what `xspin run` reads by default.
const daemonConfig = "/etc/xspin/xspin.yaml"

// exampleConfig is in the help of `xspin run`. A test loads it.
const exampleConfig = `interfaces:
  - name: eth1                  # all that no ruleset matches goes on to Linux
    hpus: 8
contexts:
  - name: inbox
    handler: deposit            # SLMP messages into the window
    windows:
      - {name: in, size: 64MiB}
    attach: {users: [nobody]}   # who may attach an application
  - name: ping
    handler: echo-icmp
  - name: telnet
    rulesets: "telnet: tcp(23)"
    handler: count
    params: {to: drop}
`

// closeTime is how long the daemon may take to end.
const closeTime = 15 * time.Second

// newRunCmd returns `xspin run`.
func newRunCmd() *cobra.Command {
	var check bool
	var socket, page string
	cmd := &cobra.Command{
		Use:   "run [CONFIG]",
		Short: "Run the daemon: NICs and contexts from a file, for applications to attach to",
		Long: `Run the daemon: it opens the interfaces that CONFIG names, installs its contexts, and
lets applications attach to them. CONFIG is ` + daemonConfig + ` if left out.

CONFIG is not the file of --config (default ` + defaultConfig + `), which has values
for the flags of commands, including --socket of this one. It is YAML, such as:

` + indent(exampleConfig) + `
The handlers:

` + indent(handlerList()) + `
docs/handlers.md says how to add your own.

A window may have ` + daemon.DefaultWindowLimit.String() + `, and all memory of contexts together ` + daemon.DefaultMemoryLimit.String() + `,
unless limits: {window: SIZE, memory: SIZE} says otherwise.

--web shows in a browser what the NICs are doing: docs/web.md says who can read it.

SIGHUP reads the file again and applies all changes or none; SIGINT and SIGTERM end
the daemon, after open messages.`,
		Example: `  sudo xspin run
  xspin run my.yaml --check
  sudo xspin run my.yaml --socket /tmp/xspin.sock
  sudo xspin run --web 9466          # and open http://127.0.0.1:9466/`,
		Args: wantArgs("[CONFIG]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			file := daemonConfig
			if len(args) == 1 {
				file = args[0]
			}
			if page != "" {
				if err := daemon.CheckWeb(page); err != nil {
					return fmt.Errorf("run: %w", err)
				}
			}
			cfg, err := loadRun(file, socket)
			switch {
			case errors.Is(err, fs.ErrNotExist) && len(args) == 0:
				return fmt.Errorf("run: %w: `xspin run --help` shows what to write there; or name another file", err)
			case err != nil:
				return fmt.Errorf("run: %s", ownLines(err))
			case check:
				for _, w := range cfg.Warnings() {
					fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
				}
				note := ""
				if slices.ContainsFunc(cfg.Contexts, func(c control.Context) bool { return c.Object != nil }) {
					note = "; no object was loaded: `xspin object check` asks the kernel's verifier"
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %s, %s%s\n", file, count(len(cfg.Interfaces), "interface"), count(len(cfg.Contexts), "context"), note)
				return err
			}
			return runDaemon(cmd, file, page, cfg)
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "only check CONFIG, and list its errors")
	cmd.Flags().StringVar(&socket, "socket", "", "where to listen (default: as CONFIG says, else XSPIN_SOCKET, else "+control.Socket+")")
	cmd.Flags().StringVar(&page, "web", "", "serve a live page at `[ADDRESS:]PORT`, of this machine only unless there is an ADDRESS")
	return cmd
}

// loadRun reads CONFIG. The socket is that of --socket, else that of the file, else that
// of XSPIN_SOCKET, where other commands look for the daemon.
func loadRun(file, socket string) (*daemon.Config, error) {
	if socket != "" {
		if err := listenAt(socket); err != nil {
			return nil, err
		}
	}
	cfg, err := daemon.Load(file)
	socket = os.Getenv("XSPIN_SOCKET")
	if err != nil || cfg.Socket != "" || socket == "" {
		return cfg, err
	}
	if err := listenAt(socket); err != nil {
		return nil, err
	}
	return daemon.Load(file)
}

// listenAt sets the variable that overrides the file's socket, also when the daemon
// reads the file again.
func listenAt(socket string) error {
	abs, err := absSocket(socket)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	return os.Setenv("XSPIN_RUN_SOCKET", abs)
}

// absSocket makes a path absolute. Abstract addresses stay as they are.
func absSocket(path string) (string, error) {
	if strings.HasPrefix(path, "@") {
		return path, nil
	}
	return filepath.Abs(path)
}

// ownLines puts several errors on lines of their own, below the first line.
func ownLines(err error) string {
	s := err.Error()
	if n := strings.Count(s, "\n"); n > 0 {
		return fmt.Sprintf("%d errors:\n%s", n+1, s)
	}
	return s
}

// runDaemon runs a daemon until a signal ends it.
func runDaemon(cmd *cobra.Command, file, page string, cfg *daemon.Config) error {
	// From here on a signal must not end the process with half of a NIC.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer signal.Stop(signals)

	abs, err := filepath.Abs(file) // for reloads: a daemon may change its directory
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	d, err := daemon.Start(cfg, daemon.Options{File: abs, Version: version(), Logger: slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)), Web: page})
	if err != nil {
		return fmt.Errorf("run: %s", ownLines(err))
	}
	log := d.Logger()
	log.Info("running", "config", abs, "interfaces", interfaceNames(cfg), "contexts", contextNames(cfg), "socket", d.Socket(), "see", seeContexts(d.Socket()))
	for s := range signals {
		if s == unix.SIGHUP {
			_, _ = d.Reload() // which logs what has changed, or why nothing has
			continue
		}
		signal.Stop(signals) // the next one ends us at once
		log.Info("ending", "signal", s.String())
		break
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), closeTime)
	defer cancel()
	if err := d.Close(ctx); err != nil {
		return fmt.Errorf("run: close: %w", err)
	}
	log.Info("ended")
	return nil
}

func interfaceNames(cfg *daemon.Config) string {
	var names []string
	for _, i := range cfg.Interfaces {
		if i.Netns != "" {
			i.Name = i.Netns + "/" + i.Name
		}
		names = append(names, i.Name)
	}
	return strings.Join(names, " ")
}

func contextNames(cfg *daemon.Config) string {
	var names []string
	for _, c := range cfg.Contexts {
		names = append(names, c.Name)
	}
	return strings.Join(names, " ")
}
